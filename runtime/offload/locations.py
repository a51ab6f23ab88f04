"""Where each parameter of a backend lies: on the device, on the host or on NVMe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from zerograph.runtime.offload.blocks import Block, StatePlace
from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.hosted import HostShards
from zerograph.runtime.torch_private import local_tensor

PARAMETER, COPY, GRADIENT = "parameter", "copy", "gradient"
"""The names of the parameters themselves, of their copies in the compute dtype, and of their gradients, beside those of
states: no optimizer has these for a state's name."""


class Locations:
    """Where parameters are by now.

    Attributes:
        params: the outward parameters by name, now and later.
        host: what is there; None where its memory is the device's.
        blocks: by parameter, of those of which anything is on NVMe.
        parameters, copied: the extents of a block's parameters, and of their copies in the compute dtype.
        divided: blocks of which a later plan has several buckets.
        offloaded: by parameter that is itself on the host or NVMe, its address there.
        on_host: of these, those on the host.
        changes: how often parameters were placed.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = params
        self.host: HostShards | None = None
        self.blocks: dict[str, Block] = {}
        self.parameters: dict[Block, Extent] = {}
        self.copied: dict[Block, Extent] = {}
        self.divided: set[Block] = set()
        self.offloaded: dict[str, int] = {}
        self.on_host: set[str] = set()
        self.changes = 0

    @property
    def hosted(self) -> HostShards:
        """The host, where a plan has something there."""
        assert self.host is not None
        return self.host

    def local(self, name: str) -> Tensor:
        """This rank's part of a parameter."""
        return local_tensor(self.params[name])

    def names(self) -> dict[int, str]:
        """The names of parameters by their ``id``."""
        return {id(p): name for name, p in self.params.items()}

    def has_left(self, name: str) -> bool:
        """Whether a parameter has been given other memory than it was placed in, as by ``model.to(dtype)``: it is
        forgotten then."""
        if name not in self.offloaded or self.local(name).data_ptr() == self.offloaded[name]:
            return False
        del self.offloaded[name]
        self.on_host.discard(name)
        return True

    def lies_on_host(self, name: str) -> bool:
        """Whether a parameter is in the host's memory, which is not the device's, or is mapped there."""
        return self.host is not None and self.host.holds(self.local(name))

    @property
    def names_on_host(self) -> set[str]:
        """The parameters that are there, as their plan has it or an earlier one."""
        on_disk = self.offloaded.keys() - self.on_host
        return {*self.on_host, *(name for name in self.params if name not in on_disk and self.lies_on_host(name))}

    def neighbours(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The other parameters on NVMe that an update of ``params`` reads and writes again: those of their buckets."""
        names = self.names() if self.parameters else {}
        own = {names[id(p)] for p in params if id(p) in names}
        blocks = dict.fromkeys(self.blocks[name] for name in own if name in self.blocks)
        beside = (name for block in blocks if block in self.parameters for name in block.begins)
        return [self.params[name] for name in beside if name not in own]

    def places(self) -> dict[int, StatePlace]:
        """Where the states of parameters are that have left the device, by ``id`` of the parameter."""
        blocks = self.blocks
        return {
            id(p): StatePlace(blocks[name], blocks[name].begins[name])
            for name, p in self.params.items()
            if name in blocks and p.requires_grad
        }
