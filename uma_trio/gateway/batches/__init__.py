"""Batches: files of requests that are answered when nobody else needs the model.

``rows`` is what is in such a file, ``results`` the files of answered rows, ``run`` the work on one file, ``store`` what
principals keep here, ``worker`` the work on all that is kept.
"""
