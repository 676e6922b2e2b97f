"""`decodefleet scale`: writes the replica count, as a user of Kubernetes would through the scale subresource."""

from __future__ import annotations

import argparse

from decodefleet_operator.api import DecoderDeployment
from decodefleet_operator.local import home
from decodefleet_operator.local.backend import with_replicas

MANAGER = "decodefleet-scale"


def run(args: argparse.Namespace) -> int:
    fleet = home.only(args.name)
    before: list[int] = []

    def change(resource: home.Json) -> home.Json:
        before.append(resource["spec"]["replicas"])
        return with_replicas(resource, args.replicas, MANAGER)

    spec = DecoderDeployment.model_validate(home.edit(fleet, change)).spec
    print(f"{fleet.name} scaled from {before[0]} to {args.replicas}")
    if spec.autoscaling is not None:
        limits = f"{spec.autoscaling.min_replicas} to {spec.autoscaling.max_replicas}"
        held = spec.autoscaling.scale_down.stabilization
        print(f"autoscaling is on ({limits}): your count is a floor for {held}, then demand decides again")
    return 0
