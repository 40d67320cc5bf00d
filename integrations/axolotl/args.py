"""The plugin's options in axolotl's YAML."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

PREFIX = "rlkernel_"


class RlkernelArgs(BaseModel):
    """What axolotl merges into its own configuration."""

    rlkernel_prefix_sharing: bool | Literal["require"] = Field(
        default=False,
        json_schema_extra={
            "description": "GRPO computes each prompt once per group; 'require': or not at all."
        },
    )
    rlkernel_prefix_min_ratio: float | None = Field(
        default=None,
        ge=1,
        json_schema_extra={"description": "Pack a batch from so many padded tokens for each packed row on."},
    )
    rlkernel_dropout: Literal["own", "shared"] = Field(
        default="own",
        json_schema_extra={"description": "Whether samples of a group may share a row's draw of dropout."},
    )
    rlkernel_vllm: bool | Literal["require"] = Field(
        default=True,
        json_schema_extra={"description": "A colocated vLLM gets rlkernel, too; 'require': or the run ends."},
    )
    rlkernel_strict: bool = Field(
        default=True,
        json_schema_extra={"description": "Only versions of axolotl and TRL that have been run."},
    )

    @model_validator(mode="before")
    @classmethod
    def check_rlkernel_options(cls, data: Any) -> Any:
        """axolotl takes keys that it does not know for none at all."""
        known = [name for name in RlkernelArgs.model_fields if name.startswith(PREFIX)]
        unknown = [name for name in data if isinstance(name, str) and name.startswith(PREFIX)]
        if wrong := [name for name in unknown if name not in known]:
            raise ValueError(f"options of rlkernel must be among {', '.join(known)}, got {', '.join(wrong)}")
        return data
