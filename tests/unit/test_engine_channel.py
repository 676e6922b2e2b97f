"""Frames over a real socket pair: whole, in order, however they are cut, and a closed end is noticed."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from decodefleet_agent.channel import AsyncChannel, Channel, ChannelClosed, decode_commands, decode_engine_message, encode
from decodefleet_agent.messages import Cancel, Commands, Failed, Output, Sampling, Stats, StepResult, Stop, Submit, TokenLogprob


def test_frames_arrive_whole_however_the_bytes_are_cut() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    assert channel.receive(wait=False) == []
    frame = (5).to_bytes(4, "little") + b"hello"
    ours.sendall(frame + frame[:6])
    assert channel.receive(wait=True) == [b"hello"]
    assert channel.receive(wait=False) == []
    ours.sendall(frame[6:] + (0).to_bytes(4, "little"))
    assert channel.receive(wait=True) == [b"hello", b""]


def test_a_large_frame_passes_while_the_other_end_reads() -> None:
    ours, theirs = socket.socketpair()
    payload = bytes(range(256)) * 20_000
    writer = threading.Thread(target=lambda: Channel(ours).send(payload))
    writer.start()
    assert Channel(theirs).receive_one() == payload
    writer.join(60)


def test_a_closed_end_is_noticed_in_both_directions() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    ours.close()
    with pytest.raises(ChannelClosed):
        channel.receive(wait=False)
    with pytest.raises(ChannelClosed):
        channel.send(b"x")


def test_what_was_sent_before_the_end_closed_is_still_received() -> None:
    ours, theirs = socket.socketpair()
    Channel(ours).send(b"last words")
    ours.close()
    channel = Channel(theirs)
    assert channel.receive(wait=False) == [b"last words"]
    with pytest.raises(ChannelClosed):
        channel.receive(wait=False)


def test_a_frame_too_long_is_another_protocol() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises(ValueError, match="same protocol"):
        Channel(theirs).receive(wait=True)


async def test_the_asynchronous_end_speaks_the_same() -> None:
    ours, theirs = socket.socketpair()
    server, engine = await AsyncChannel.open(ours), Channel(theirs)
    await server.send(b"to the engine")
    assert await asyncio.to_thread(engine.receive_one) == b"to the engine"
    engine.send(b"back")
    assert await server.receive_one() == b"back"
    engine.close()
    with pytest.raises(ChannelClosed):
        await server.receive_one()
    await server.close()


def test_messages_survive_the_wire() -> None:
    commands = Commands([Submit(1, [1, 2], Sampling(seed=2**64 - 1, stop_token_ids=(2,)), output_ids=[3]), Cancel(1), Stop()])
    assert decode_commands(encode(commands)) == commands
    step = StepResult([Output(1, [5], [TokenLogprob(5, -0.5, [(5, -0.5)])], finish="stop")], Stats(running=1))
    assert decode_engine_message(encode(step)) == step
    assert decode_engine_message(encode(Failed("no"))) == Failed("no")
