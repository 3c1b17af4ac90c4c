"""A worker that has the key of its ``KVDIST_RANK`` and says that it is another: ``forger.py RANK``."""

import sys
import time
from dataclasses import replace

from kvdist.config.environment import cluster_from_env
from kvdist.config.sockets import scheduler_endpoint
from kvdist.core.worker.requests import Register
from kvdist.core.worker.worker import Worker
from kvdist.runtime.cluster import introduction
from kvdist.runtime.node import Node
from kvdist.transport.factory import open_transport


def main():
    config = cluster_from_env()
    transport, _ = open_transport(config)
    claimed = introduction(replace(config, rank=int(sys.argv[1])), "", scheduler_endpoint(config))
    machine = Worker(claimed, config.limits, time.monotonic())
    node = Node(machine, transport, config.job_tag, config.limits.explain_after_s)
    future = node.submit(Register)
    node.run()
    raise future.exception()


if __name__ == "__main__":
    main()
