"""Bytes, hellos and frames that are nearly right."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from twinpool.core.payload import HostPayload

_EXTREMES = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1)


class Mutator:
    """Spoils what it is given in one of many ways, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def spoiled(self, data: bytes, others: Sequence[bytes] = ()) -> bytes:
        """Return bytes that differ a little: flipped, cut, longer, swapped, with lengths that lie, mixed."""
        rng = self._rng
        at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        number = struct.pack(rng.choice("<>") + "I", rng.choice(_EXTREMES))
        other = rng.choice(others) if others else rng.randbytes(rng.randrange(64))
        match rng.randrange(9):
            case 0:
                return self._flipped(data)
            case 1:
                return data[:at]
            case 2:
                return data[:at] + data[end:]
            case 3:
                return data[:at] + rng.randbytes(rng.randrange(1, 40)) + data[at:]
            case 4:
                return data[:at] + number + data[at + 4 :]
            case 5:
                return number + data[4:]
            case 6:
                return data[:at] + data[at:end] * rng.randrange(2, 4) + data[end:]
            case 7:
                return data[end:] + data[at:end] + data[:at]
            case _:
                return data[:at] + other[min(at, len(other)) :]

    def hello(self, hello: Hello) -> Hello:
        """Return a hello with one field that is wrong, and the proof of the right one."""
        rng = self._rng
        name = rng.choice([field.name for field in fields(hello)])
        value: Any = getattr(hello, name)
        if isinstance(value, int):
            largest = 2**64 - 1 if name == "epoch" else 2**32 - 1
            return replace(hello, **{name: rng.choice([value + 1, largest, *_EXTREMES[2:]]) & largest})
        if isinstance(value, bytes):
            return replace(
                hello, **{name: rng.choice([b"", bytes(len(value)), value[:-1], self._flipped(value)])}
            )
        return replace(hello, **{name: rng.choice(["", value[:-1], value + "x", "\0", "x" * 3000])})

    def frame(self, frame: Frame) -> Frame:
        """Return a frame with one field that is wrong, in half of the cases with the checksum of that."""
        rng = self._rng
        name = rng.choice(["layer", "first_token", "num_tokens", "checksum", "payload"])
        if name == "payload":
            data = frame.payload.views()[0].tobytes()
            wrong = replace(frame, payload=HostPayload([memoryview(self.spoiled(data))]))
        else:
            right = getattr(frame, name)
            wrong = replace(frame, **{name: rng.choice([right + 1, max(0, right - 1), *_EXTREMES])})
        return wrong.sealed() if rng.random() < 0.5 else wrong

    def chosen(self, items: Sequence[Any]) -> Any:
        """Return one of them."""
        return self._rng.choice(items)

    def conversation(self, said: Sequence[bytes]) -> list[bytes]:
        """Return what a sender says, with one message that is spoiled, missing, repeated or out of place."""
        rng, said = self._rng, list(said)
        at, to = rng.randrange(len(said)), rng.randrange(len(said))
        match rng.randrange(6):
            case 0:
                del said[at]
            case 1:
                said.insert(to, said[at])
            case 2:
                said[at], said[to] = said[to], said[at]
            case _:
                said[at] = self.spoiled(said[at], said)
        return said

    def _flipped(self, data: bytes) -> bytes:
        flipped = bytearray(data)
        for _ in range(self._rng.randrange(1, 4) if data else 0):
            flipped[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return bytes(flipped)
