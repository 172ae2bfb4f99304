"""Configurations of other projects, as job files."""
