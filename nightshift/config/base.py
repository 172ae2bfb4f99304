"""What every section of a job file shares."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the job file: unknown keys are refused, values are checked on assignment too.

    Numbers may be written as text in YAML ("8"), since overrides on a command line are text; a bool is never a number.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True, allow_inf_nan=False)
