"""Simulated services: the real wire contracts, and a model of speed, memory and lengths in place of any arithmetic."""
