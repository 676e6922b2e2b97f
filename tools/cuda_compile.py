"""Compiles every kernel of the cuda backend for GPUs of the compute capabilities that it is given ("90"), which needs no GPU.

A line for each: ok or FAIL, the kernel, the capability, bytes of shared memory, instructions for tensor cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from decodefleet_agent.engine.backends.triton_kernels import PARTITION, ROWS, attention, elementwise, linear, pool, sampling

SHARED = 101_376  # bytes that a program may use on GPUs such as the RTX 4090; others have more
INTEGERS = {"rows", "slots", "width", "partitions"}
FLOATS = {"epsilon", "scale"}
POINTERS = {
    **dict.fromkeys(("keys", "values"), "*i8"),
    **dict.fromkeys(("positions", "row_slots", "tile_row", "tile_tokens", "tile_position", "tile_span", "page_table", "index"), "*i32"),
}
SAMPLING = {"logits": "*fp32", "temperatures": "*fp64"}  # all else of that kernel is int64


def kernels() -> Iterator[tuple[triton.JITFunction, dict[str, object], dict[str, str]]]:
    """Each kernel with its constants, and the types of pointers that are not what `POINTERS` says, fp32 by default."""
    for dtype in ("*bf16", "*fp32"):
        sizes = {"INPUTS": 576, "OUTPUTS": 1536, "ROWS": ROWS, "COLUMNS": linear._COLUMNS, "DEPTH": linear._DEPTH}
        yield linear._linear, {**sizes, "BIAS": True, "ADD": True, "PRECISION": "ieee"}, {"x": dtype, "weight": dtype}
    yield elementwise._rms_norm, {"SIZE": 576, "BLOCK": 1024, "PICK": True}, {"out": "*bf16"}
    yield elementwise._swiglu, {"SIZE": 1536, "BLOCK": elementwise._BLOCK}, {"out": "*bf16"}
    for dim in (64, 128):
        heads = {"KV_HEADS": 3, "DIM": dim, "ROWS": ROWS}
        yield pool._write, {**heads, "HEADS": 9}, {}
        grouped = {**heads, "GROUP": 3, "PARTITION": PARTITION}
        for precision in ("ieee", "tf32"):
            yield attention._partials, {**grouped, "KEYS": attention._KEYS, "PRECISION": precision}, {}
        yield attention._combine, grouped, {"out": "*bf16"}
    names = [parameter.name for parameter in sampling._sample.params]
    yield sampling._sample, {"VOCABULARY": 49152, "BLOCK": sampling._BLOCK}, {name: SAMPLING.get(name, "*i64") for name in names}


def compiled(kernel: triton.JITFunction, constants: dict[str, object], types: dict[str, str], capability: int) -> str:
    """What it came to, from the word after the kernel's name."""
    signature = {}
    for parameter in kernel.params:
        name = parameter.name
        kind = "i32" if name in INTEGERS else "fp32" if name in FLOATS else types.get(name) or POINTERS.get(name, "*fp32")
        signature[name] = "constexpr" if name in constants else kind
    aligned = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 8 if kernel is sampling._sample else 4, "num_stages": 4 if kernel is linear._linear else 2}
    program = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if program.metadata.shared > SHARED:
        raise ValueError(f"{program.metadata.shared} bytes of shared memory")
    return f"{program.metadata.shared} {program.asm['ptx'].count('mma.sync')}"


def main(capabilities: list[int]) -> int:
    status = 0
    for capability in capabilities:
        for kernel, constants, types in kernels():
            try:
                print("ok  ", kernel.__name__, capability, compiled(kernel, constants, types, capability))
            except Exception as error:
                print("FAIL", kernel.__name__, capability, error)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main([int(text) for text in sys.argv[1:]] or [80, 90, 100]))
