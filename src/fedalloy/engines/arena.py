"""Tensors in memory that two processes share: one copy in, views out."""

import mmap
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from fedalloy.core.wire import Items

Entry = tuple[str, str, list[int], int]  # key, dtype, shape, offset
_ALIGN = 64


class Arena:
    """A growing anonymous file. The writer puts tensors, the reader gets views by the entries it is told.

    Made before a fork, it is shared with the child and gone when both are.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("fedalloy")
        self._size = 0
        self._map: mmap.mmap | None = None
        self.clear()

    def clear(self) -> None:
        """Write from the beginning again; views handed out so far are no longer good."""
        self._at = 0
        self._written: dict[int, tuple[Tensor, str, list[int], int]] = {}

    def put(self, items: Mapping[str, Tensor]) -> list[Entry]:
        """Copy tensors in; one that was put since the last `clear` is not copied again."""
        entries: list[Entry] = []
        for key, value in items.items():
            if id(value) not in self._written:
                self._written[id(value)] = (value, *self._copy(value))
            _, dtype, shape, offset = self._written[id(value)]
            entries.append((key, dtype, shape, offset))
        return entries

    def get(self, entries: list[Entry]) -> Items:
        """Views of what the other process put."""
        items: Items = {}
        for key, dtype_name, shape, offset in entries:
            dtype = getattr(torch, dtype_name)
            count = torch.Size(shape).numel()
            if count == 0:
                items[key] = torch.empty(shape, dtype=dtype)
                continue
            self._reach(offset + count * dtype.itemsize)
            assert self._map is not None
            items[key] = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)
        return items

    def close(self) -> None:
        self.clear()
        self._map = None  # unmapped when the last view is gone
        os.close(self._file)

    def _copy(self, value: Tensor) -> tuple[str, list[int], int]:
        offset = -(-self._at // _ALIGN) * _ALIGN
        self._at = offset + value.numel() * value.element_size()
        if self._at > os.fstat(self._file).st_size:
            os.ftruncate(self._file, max(self._at, 2 * self._size))
        entry: Entry = ("", str(value.dtype).removeprefix("torch."), list(value.shape), offset)
        if value.numel():
            self.get([entry])[""].copy_(value)
        return entry[1:]

    def _reach(self, size: int) -> None:
        if self._map is None or size > self._size:
            self._size = os.fstat(self._file).st_size
            self._map = mmap.mmap(self._file, self._size)
