"""A client of the job service: what the command line, the page and the Python API are made of."""

from nightshift.client.client import Client
from nightshift.client.problems import ServiceError

__all__ = ["Client", "ServiceError"]
