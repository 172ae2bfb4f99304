"""The job file: one pydantic model per section, unknown keys refused."""

from nightshift.config.job import JobSpec

__all__ = ["JobSpec"]
