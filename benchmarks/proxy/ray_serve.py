"""Ray Serve with two replicas of the program, as its guide starts them. Run by the Python that has Ray.

    python -m benchmarks.proxy.ray_serve PORT FOLDER

All of Ray's processes are children of this one and end with it.
"""

from __future__ import annotations

import sys
import time

import ray
from ray import serve

from benchmarks.proxy.replica import program

NUM_REPLICAS = 2


class Echo:
    """It answers like the program."""


def main(port: int, folder: str) -> None:
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        _temp_dir=folder,
    )
    quiet = {"enable_access_log": False, "log_level": "ERROR"}
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=quiet)
    deployment = serve.deployment(
        num_replicas=NUM_REPLICAS,
        max_ongoing_requests=1024,
        ray_actor_options={"num_cpus": 0},
        logging_config=quiet,
    )
    serve.run(deployment(serve.ingress(program)(Echo)).bind())
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
