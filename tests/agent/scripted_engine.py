"""An engine that says its prompt back, one token a step: for tests of the server whose timing or text must be exact.

SCRIPT (JSON) sets `step` (seconds), `loading` (seconds), `fail` (message of Failed), `eos` (stop at the prompt's end).
"""

import json
import os
import socket
import sys
import time

from decodefleet.config import AgentConfig
from decodefleet_agent import channel
from decodefleet_agent.messages import Cancel, Failed, ModelInfo, Output, Progress, Ready, Stats, StepResult, Stop, Submit

PAGE_BYTES = 1024
SCRIPT = json.loads(os.environ.get("SCRIPT", "{}"))


def main() -> None:
    link = channel.Channel(socket.socket(fileno=int(sys.argv[1])))
    config = AgentConfig.model_validate_json(link.receive_one())
    link.send(channel.encode(Progress("loading", 0.5, "reading the script")))
    time.sleep(SCRIPT.get("loading", 0))
    if "fail" in SCRIPT:
        link.send(channel.encode(Failed(SCRIPT["fail"])))
        return
    info = ModelInfo("echo", 1, 512, 49152, "echo-1", "none", [2], 16, 4096)
    link.send(channel.encode(Ready(info, 0.1, None, None, [])))
    serve(link, config.engine.batching.max_batch)


def serve(link: channel.Channel, max_batch: int) -> None:
    running: dict[int, Submit] = {}
    waiting: dict[int, Submit] = {}
    produced: dict[int, int] = {}
    steps = generated = 0
    while True:
        freed = False
        for frame in link.receive(wait=not running and not waiting):
            for command in channel.decode_commands(frame).items:
                match command:
                    case Submit():
                        waiting[command.sequence_id] = command
                        produced[command.sequence_id] = len(command.output_ids)
                    case Cancel():
                        freed |= (running.pop(command.sequence_id, None) or waiting.pop(command.sequence_id, None)) is not None
                    case Stop():
                        return
        while waiting and len(running) < max_batch:
            sequence_id = next(iter(waiting))
            running[sequence_id] = waiting.pop(sequence_id)
        if not running and not freed:
            continue
        outputs = []
        if running:
            time.sleep(SCRIPT.get("step", 0.005))
            steps += 1
        for sequence_id, submit in list(running.items()):
            outputs.append(say(submit, produced[sequence_id]))
            first = produced[sequence_id] == len(submit.output_ids)
            produced[sequence_id] += 1
            generated += 1
            if not first:
                outputs[-1] = Output(sequence_id, outputs[-1].token_ids, finish=outputs[-1].finish)
            if outputs[-1].finish:
                del running[sequence_id]
        stats = Stats(
            running=len(running),
            waiting=len(waiting),
            kv_bytes_used=len(running) * PAGE_BYTES,
            kv_bytes_total=4096 * PAGE_BYTES,
            generated_tokens=generated,
            steps=steps,
            batch=len(outputs),
            step_seconds=SCRIPT.get("step", 0.005),
        )
        link.send(channel.encode(StepResult(outputs, stats)))


def say(submit: Submit, position: int) -> Output:
    ids = submit.prompt_ids
    ended = SCRIPT.get("eos") and position >= len(ids)
    token = 2 if ended else ids[position % len(ids)]
    finish = "stop" if token in submit.sampling.stop_token_ids else "length" if position + 1 >= submit.sampling.max_tokens else None
    return Output(submit.sequence_id, [token], finish=finish, cached_prompt_tokens=0, scheduled_at=time.monotonic())


if __name__ == "__main__":
    try:
        main()
    except channel.ChannelClosed:
        sys.exit(0)
