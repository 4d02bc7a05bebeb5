"""The model at work: the one room that knows llama_abi.

The rest of the daemon speaks to it in the plain records of ``records``, so an engine can live in this
process, in another one, or be a fake.
"""
