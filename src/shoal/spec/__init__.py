"""What people ask for: a job or service as YAML, flags or plain data, parsed once, validated and frozen.

yaml_tree -> files       YAML text to plain data, with the line of every value (only `files` needs PyYAML)
parse                    plain data from the SDK or the API, and flags, to the same models
job, service             `JobSpec` and `ServiceSpec`; job_fields, service_fields, resources, array hold their
parts
quantity, text           amounts, times and texts as people write them
launchers                the processes and nodes that `torchrun` or `mpirun` in `run` ask for
problems, error_text     every mistake as a sentence, with its line, path or flag and the nearest valid name

This folder knows no cluster, no database and no clock. Whether a request can be met is the scheduler's
decision.
"""

from shoal.spec.array import ArraySpec
from shoal.spec.job import JobSpec
from shoal.spec.job_fields import AfterSpec, CheckpointSpec, LogRuleSpec, MountSpec, RetrySpec, TopologySpec
from shoal.spec.parse import flags_schema, job_schema, parse_job, spec_from_flags
from shoal.spec.resources import ByteRange, CpuRange, GpuSpec, NodeRange, Resources

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
