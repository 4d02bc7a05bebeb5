"""AICI's API over HTTP.

Source: docs/REST.md of microsoft/aici.  Its servers take the user's name and role from headers of a proxy; here both come
from the API key.
"""
