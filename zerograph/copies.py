"""Copies of sharded models: a backend takes over faces that another one made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerograph.config import Config
from zerograph.errors import UnsupportedError
from zerograph.faces import Face, face_of, unique


def take_over(
    roots: Sequence[nn.Module], config: Config, mesh: DeviceMesh | None, mine: Mapping[str, nn.Parameter]
) -> dict[str, nn.Parameter]:
    """The sharded parameters of ``roots`` that are not in ``mine``, by unique name: deep copies and unpickled models.

    Raises:
        UnsupportedError: they are sharded in another way than ``config`` asks for.
    """
    known = {id(param) for param in mine.values()}
    taken: dict[int, tuple[Face, nn.Parameter]] = {}
    for faces, attribute, param in _faced(roots):
        if id(param) in known:
            continue
        if id(param) not in taken:
            face = faces[attribute]
            _check(face, param, config, mesh)
            used = {f.name for f, _ in taken.values()}
            taken[id(param)] = (face._replace(name=unique(face.name, used, mine)), param)
        faces[attribute] = taken[id(param)][0]
    return {face.name: param for face, param in taken.values()}


def _faced(roots: Sequence[nn.Module]) -> Iterator[tuple[dict[str, Face], str, nn.Parameter]]:
    for module in dict.fromkeys(m for root in roots for m in root.modules()):
        faces = module.__dict__.get("_zg_faces", {})
        for attribute in faces:
            param = module._parameters[attribute]
            if param is not None:
                yield faces, attribute, param


def _check(face: Face, param: nn.Parameter, config: Config, mesh: DeviceMesh | None) -> None:
    plain = torch.empty(param.shape, dtype=param.dtype, device="meta")
    wanted = face_of(plain, face.name, config, mesh)
    if wanted != face:
        differing = [f for f in Face._fields if getattr(wanted, f) != getattr(face, f)]
        raise UnsupportedError(
            f"parameter {face.name} was sharded by another backend with {_settings(face, differing)}; "
            f"this one needs {_settings(wanted, differing)}",
            "give the copy's backend the arguments of the original's, or load the values into a plain model: "
            "zerograph.export(model, path)",
        )


def _settings(face: Face, fields: list[str]) -> str:
    return ", ".join(f"{field}={getattr(face, field)!r}" for field in fields)
