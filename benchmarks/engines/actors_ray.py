"""Start an actor for each rank, with a driver of Ray's own. Arguments: the head's address, and the
doorbell's.

Every line of input is a list of labels. An actor is made for each, on Ray's nodes in turn, and sends its
label as soon as it runs. When all have done so, the driver prints `begun` and ends them.
"""

from __future__ import annotations

import json
import socket
import sys

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=0)
class Rank:
    def __init__(self, label: str, host: str, port: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bell:
            bell.sendto(label.encode(), (host, port))

    def is_there(self) -> bool:
        return True


def main() -> None:
    address, host, port = sys.argv[1:]
    ray.init(address=address, _node_ip_address=address.partition(":")[0], log_to_driver=False)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    for line in sys.stdin:
        ranks = [
            Rank.options(  # type: ignore[attr-defined]
                scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=False)
            ).remote(label, host, int(port))
            for number, label in enumerate(json.loads(line))
        ]
        ray.get([rank.is_there.remote() for rank in ranks])
        print("begun", flush=True)
        for rank in ranks:
            ray.kill(rank)


if __name__ == "__main__":
    main()
