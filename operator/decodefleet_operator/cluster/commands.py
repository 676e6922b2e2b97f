"""`decodefleet operator`."""

from __future__ import annotations

import argparse
import os
import sys


def operator(parser: argparse.ArgumentParser) -> None:
    """Run the operator of a cluster.

    It finds the cluster by the pod's service account or by KUBECONFIG. Several may run; one leads.
    """
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--namespace", help="the namespace to watch (default: the operator's own)")
    where.add_argument("--all-namespaces", action="store_true", help="watch them all; needs a ClusterRole")
    parser.add_argument("--agent-image", required=True, help="image of agents whose resource names none")
    parser.add_argument("--agent-image-pull-policy", choices=("Always", "IfNotPresent", "Never"), help="as in a container")
    parser.add_argument("--http-port", type=int, default=8081, help="port of /healthz and /metrics (default 8081; 0 draws one)")
    parser.add_argument("--lease-namespace", help="where the leader's Lease lies (default: the watched namespace, or the operator's own)")
    parser.add_argument("--lease-name", default="decodefleet-operator", help="name of the Lease (default decodefleet-operator)")
    parser.add_argument("--placements", metavar="FILE", help="placement profiles in YAML")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="(default info)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    import asyncio
    import logging

    from kubernetes.config import ConfigException

    from decodefleet_operator import logs
    from decodefleet_operator.cluster.process import OptionError, Options, own_namespace, read_profiles, run

    logs.set_up(args.log_level)
    logging.getLogger("kopf").setLevel(logging.WARNING)  # it tells of each event that it hands over
    namespace = None if args.all_namespaces else args.namespace or own_namespace()
    try:
        options = Options(
            namespace=namespace,
            agent_image=args.agent_image,
            agent_image_pull_policy=args.agent_image_pull_policy,
            http_port=args.http_port,
            lease_namespace=args.lease_namespace or namespace or own_namespace(),
            lease_name=args.lease_name,
            profiles=read_profiles(args.placements) if args.placements else {},
        )
        status = asyncio.run(run(options))
    except (OptionError, ConfigException) as error:
        print(f"decodefleet operator: {error}", file=sys.stderr)
        return 1
    sys.stderr.flush()
    os._exit(status)  # the thread of kopf may hang in a request; nothing of it is worth waiting for
