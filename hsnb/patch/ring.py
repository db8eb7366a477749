"""A bounded ring of host memory between the model's device and the process that writes, page-locked when the device is a GPU.

It is a file without a name (memfd), so that both map the same memory. Pieces are taken in order by the forward's thread and given
back in any order by the writing process; the space of a piece is used again once every older piece is back. So the memory never
grows, and a writer that falls behind is felt as a wait in `take`. A disk that hangs must not hang the model: when no piece comes
back for PATIENCE_S, `take` refuses until one does.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

VARIABLE = "SGLANG_HS_DUMP_RING_MIB"
_CHUNKS = 4  # with overlapped scheduling two batches are on the device while a third is written
_LEAST, _MOST = 64 << 20, 2 << 30  # bytes, of the default
_EDGES = 4096  # bytes, so that a chunk with its ids fits a piece: one message for a chunk, because each stops the forward for a moment
_ALIGN = 512  # bytes: a piece can be viewed as any dtype
PATIENCE_S = 60.0  # SGLang's own watchdog ends a scheduler that stands still for 300


@dataclass
class Slot:
    """Bytes start..end of the ring."""

    start: int
    end: int
    back: bool = False


def ring_bytes(chunk_tokens: int, token_bytes: int) -> int:
    """Return the ring's size: SGLANG_HS_DUMP_RING_MIB, or four prefill chunks within 64 MiB and 2 GiB. Raises ValueError."""
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return min(max(_CHUNKS * (chunk_tokens * token_bytes + _EDGES), _LEAST), _MOST)
    if not asked.isdigit() or int(asked) < 1:
        raise ValueError(f"{VARIABLE} is {asked!r}, expected a whole number of MiB, 1 or more")
    return int(asked) << 20


class Ring:
    """`nbytes` of host memory, in the open file `fd`. Raises RuntimeError when they cannot be page-locked."""

    def __init__(self, nbytes: int, *, pin: bool = False):
        self.fd = os.memfd_create("hsnb-ring")
        os.ftruncate(self.fd, nbytes)
        self.memory = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)
        self.largest = nbytes // _CHUNKS // _ALIGN * _ALIGN  # bytes of one piece: several are always on their way
        self._pinned = pin
        if pin:  # not pin_memory=True, which takes the next power of two
            code = torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), nbytes, 0)
            if int(code):
                raise RuntimeError(f"{nbytes >> 20} MiB could not be page-locked ({code}): set {VARIABLE} to less")
        self._slots: deque[Slot] = deque()  # oldest first
        self._head = 0
        self._given = 0  # pieces that came back, ever
        self._stuck = -1  # what _given was when the patience ended
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> tuple[Slot, float]:
        """Return the next `nbytes` and the seconds that were waited for them.

        Raises ValueError for more than one piece may have, TimeoutError when the ring is full and nothing comes back.
        """
        nbytes = -(-nbytes // _ALIGN) * _ALIGN
        if nbytes > self.largest:
            raise ValueError(f"a piece of {nbytes:,} bytes, at most {self.largest:,} of a ring of {len(self.memory):,}: raise {VARIABLE}")
        with self._changed:
            start, waited = self._room(nbytes), 0.0
            if start is None:
                before = time.monotonic()
                while (start := self._room(nbytes)) is None:
                    given = self._given
                    if given == self._stuck or not self._changed.wait_for(lambda given=given: self._given > given, PATIENCE_S):
                        self._stuck = given
                        raise TimeoutError(f"the ring of {len(self.memory) >> 20} MiB is full and nothing was written for {PATIENCE_S:g} s")
                waited = time.monotonic() - before
            slot = Slot(start, start + nbytes)
            self._slots.append(slot)
            self._head = slot.end
        return slot, waited

    def _room(self, nbytes: int) -> int | None:
        """Return where `nbytes` fit now. Where head and tail meet and something is taken the ring is full."""
        if not self._slots:
            return 0
        tail = self._slots[0].start
        if self._head > tail:
            if len(self.memory) - self._head >= nbytes:
                return self._head
            return 0 if nbytes <= tail else None
        return self._head if nbytes <= tail - self._head else None

    def give(self, slot: Slot) -> None:
        """Give a piece back."""
        with self._changed:
            slot.back = True
            self._given += 1
            while self._slots and self._slots[0].back:
                self._slots.popleft()
            self._changed.notify_all()

    def view(self, slot: Slot, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over the bytes of `slot` from `offset` on."""
        start = slot.start + offset
        count = dtype.itemsize
        for n in shape:
            count *= n
        return self.memory[start : start + count].view(dtype).view(shape)

    def close(self) -> None:
        """Unlock the pages, and let the memory go when nothing maps it any more."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            self._pinned = False
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
