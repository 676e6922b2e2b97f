"""`decodefleet get`: the fleets of this machine in a table, or one as JSON or YAML."""

from __future__ import annotations

import argparse
import json

from decodefleet_operator.local import home
from decodefleet_operator.local.home import Fleet, Json
from decodefleet_operator.local.watch import Snapshot, look, since

Row = list[str]


def run(args: argparse.Namespace) -> int:
    found = [home.only(args.name)] if args.name else home.fleets()
    alive = [fleet for fleet in found if home.running(fleet)]
    dead = [fleet for fleet in found if fleet not in alive]
    snapshots = [look(fleet) for fleet in alive]
    if args.output in ("json", "yaml"):
        items = [snapshot.resource for snapshot in snapshots]
        print(_text(items[0] if args.name else {"apiVersion": "v1", "kind": "List", "items": items}, args.output))
        return 0
    if snapshots:
        wide = args.output == "wide"
        print(table([_header(wide), *(_row(fleet, snapshot, wide) for fleet, snapshot in zip(alive, snapshots, strict=True))]))
    elif not dead:
        print("no fleet runs here; start one with `decodefleet up -f examples/smollm2.yaml`")
    for fleet in dead:
        why = look(fleet).info.get("error", "its supervisor was killed")
        print(f"{fleet.name} is not running any more: {why}; `decodefleet down {fleet.name}` clears what it left")
    return 0


def table(rows: list[Row]) -> str:
    """Columns aligned to the left, three spaces apart, as kubectl prints them."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _header(wide: bool) -> Row:
    return ["NAME", "READY", "DESIRED", "SLA", "TOK/S", "COST/1M", "AGE"] + (["ENDPOINT", "REVISION", "MODEL", "STATUS"] if wide else [])


def _row(fleet: Fleet, snapshot: Snapshot, wide: bool) -> Row:
    status, spec = snapshot.status, snapshot.resource.get("spec", {})
    ready = snapshot.condition("Ready")
    row = [
        fleet.name,
        f"{status.get('readyReplicas', 0)}/{status.get('replicas', 0)}",
        dash(spec.get("replicas")),
        dash((status.get("sla") or {}).get("attainment")),
        dash(status.get("tokensPerSecond")),
        dash((status.get("cost") or {}).get("perMillionTokens")),
        since(snapshot.created),
    ]
    if wide:
        state = "Stopping" if snapshot.info.get("stopping") else ready["reason"] if ready else None
        row += [dash(snapshot.endpoint), dash(status.get("revision")), dash(spec.get("model", {}).get("uri")), dash(state)]
    return row


def dash(value: object) -> str:
    """A value as a cell; what is not known is a dash."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _text(value: Json, form: str) -> str:
    if form == "json":
        return json.dumps(value, indent=2)
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip()
