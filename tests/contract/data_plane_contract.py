"""What callers and replicas see of a data plane, whichever it is. Each adds a fixture."""

from __future__ import annotations

from tests.contract.data_plane_admission import AdmissionContract
from tests.contract.data_plane_path import PathContract
from tests.contract.data_plane_replicas import ReplicasContract


class DataPlaneContract(PathContract, AdmissionContract, ReplicasContract):
    """All of it."""
