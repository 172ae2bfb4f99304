"""Nightshift: asynchronous reinforcement-learning post-training for language models, run as a service."""

__version__ = "0.1.0"
