"""What people ask for: a job as YAML, flags or plain data, parsed once, validated and frozen.

`shoal.spec.files` reads YAML and is imported by whoever loads files. Nothing here knows a cluster, a
database or the clock: whether a request can ever be met is the scheduler's to say.
"""

from shoal.spec.array import ArraySpec
from shoal.spec.clauses import AfterSpec, CheckpointSpec, LogRuleSpec, MountSpec, RetrySpec, TopologySpec
from shoal.spec.flags import spec_from_flags
from shoal.spec.job import JobSpec
from shoal.spec.parse import parse_job
from shoal.spec.resources import ByteRange, CpuRange, GpuSpec, NodeRange, Resources
from shoal.spec.schema import flags_schema, job_schema

__all__ = [
    "AfterSpec",
    "ArraySpec",
    "ByteRange",
    "CheckpointSpec",
    "CpuRange",
    "GpuSpec",
    "JobSpec",
    "LogRuleSpec",
    "MountSpec",
    "NodeRange",
    "Resources",
    "RetrySpec",
    "TopologySpec",
    "flags_schema",
    "job_schema",
    "parse_job",
    "spec_from_flags",
]
