"""Every argument of ``zerograph.backend``, right and wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import fake_world
from torch.distributed.device_mesh import init_device_mesh

import zerograph
from zerograph.compiler.frame_plan import farthest, placement_of
from zerograph.core.config import OFFLOAD, Config
from zerograph.core.errors import ConfigError, ZeroGraphError
from zerograph.core.machine import machine_named
from zerograph.core.plan import DEVICE, OFFLOADS, Placement, level_at

WRONG: list[tuple[str, Any, str]] = [
    ("stage", 4, 'stage must be 0, 1, 2, 3 or "auto", got 4'),
    ("stage", -1, "got -1"),
    ("stage", "3", "got '3'"),
    ("stage", 3.0, "got 3.0"),
    ("stage", True, "got True"),
    ("stage", None, "got None"),
    ("prefetch", -1, "prefetch must be a number of buckets >= 0, got -1"),
    ("prefetch", 1.0, "got 1.0"),
    ("prefetch", "1", "got '1'"),
    ("prefetch", True, "got True"),
    ("prefetch", None, "got None"),
    ("bucket_size", 0, "must be positive"),
    ("bucket_size", -5, "negative"),
    ("bucket_size", "big", "'big' is not a size"),
    ("bucket_size", "32 apples", "is not a size"),
    ("bucket_size", "0MiB", "must be positive"),
    ("bucket_size", 1.5, "1.5 is not a size"),
    ("bucket_size", None, "None is not a size"),
    ("bucket_size", True, "True is not a size"),
    ("memory", "lots", "'lots' is not a size"),
    ("memory", 0, "must be positive"),
    ("memory", 1.5, "1.5 is not a size"),
    ("machine", "abacus", "no machine 'abacus'"),
    ("machine", 8, "machine must be the name of a preset or a file, got 8"),
    ("recompute", "all", 'recompute must be "auto", "none", "full" or a share of layers from 0 to 1, got \'all\''),
    ("recompute", 1.5, "got 1.5"),
    ("recompute", -0.1, "got -0.1"),
    ("recompute", float("nan"), "got nan"),
    ("recompute", True, "got True"),
    ("recompute", None, "got None"),
    ("offload", "all", "offload must be one of"),
    ("offload", None, "got None"),
    ("offload", ["optimizer"], "got \\['optimizer'\\]"),
    ("tier", "device", "tier must be one of \\('host', 'nvme'\\), got 'device'"),
    ("tier", "host", "tier='host' is given, and offload is none"),
    ("update", "there", "update must be one of \\('host', 'device', 'auto'\\), got 'there'"),
    ("update", "auto", 'update="auto" is for a search'),
    ("loss_tiles", 0, 'loss_tiles must be "auto" or a number of tiles >= 1, got 0'),
    ("loss_tiles", True, "got True"),
    ("loss_tiles", 2.0, "got 2.0"),
    ("loss_tiles", "off", "got 'off'"),
    ("token_tiles", 0, 'token_tiles must be "auto" or a number of tiles >= 1, got 0'),
    ("token_tiles", "off", "got 'off'"),
    ("loss_only", 1, "loss_only must be True or False, got 1"),
    ("compute", "triton", "compute must be one of"),
    ("compute", None, "got None"),
    ("compute", ["eager"], "got \\['eager'\\]"),
    ("dtype", torch.int64, "dtype must be a floating torch.dtype"),
    ("dtype", torch.complex64, "got torch.complex64"),
    ("dtype", "bfloat16", "got 'bfloat16'"),
    ("dtype", torch.float8_e4m3fn, "got torch.float8"),
    ("reduce_dtype", torch.int32, "reduce_dtype must be"),
    ("reduce_dtype", 32, "got 32"),
    ("mesh", 8, "mesh must be a torch DeviceMesh, got int"),
    ("mesh", "dp", "got str"),
]


@pytest.mark.parametrize(("argument", "value", "message"), WRONG, ids=lambda v: str(v)[:20])
def test_a_wrong_argument_is_named_at_once_with_a_hint(argument: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        zerograph.backend(**{argument: value})
    assert argument in str(caught.value)
    assert caught.value.hint


def test_an_unknown_argument() -> None:
    with pytest.raises(ConfigError, match="has no argument 'stages'") as caught:
        zerograph.backend(stages=3)
    assert "stage, mesh, dtype" in caught.value.hint


def test_stage_auto_and_a_budget() -> None:
    config = Config.of(stage="auto", memory="70GiB", machine="a100-80gb")
    assert (config.stage, config.sharding, config.memory) == ("auto", 3, 70 * 2**30)
    assert config.searches and Config.of(memory=1).searches and not Config.of().searches
    assert config.machine == machine_named("a100-80gb")
    assert config.given == {"stage", "memory", "machine"}


def test_a_measured_machine(tmp_path: Path) -> None:
    measured = dataclasses.replace(machine_named("cpu"), name="here")
    (tmp_path / "machine.json").write_text(measured.to_json())
    assert Config.of(machine=str(tmp_path / "machine.json")).machine == measured
    assert Config.of(machine=measured).machine == measured


def test_a_mesh_of_three_dimensions_and_its_slices() -> None:
    with fake_world(0, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("tp", "dp_replicate", "dp_shard"))
        with pytest.raises(ConfigError, match="mesh has 3 dimensions") as caught:
            zerograph.backend(mesh=mesh)
        assert 'mesh["dp_replicate", "dp_shard"]' in caught.value.hint
        assert zerograph.backend(mesh=mesh["dp_shard"]).config.mesh.size() == 2
        assert zerograph.backend(mesh=mesh["dp_replicate", "dp_shard"]).config.mesh.shape == (2, 2)


def test_every_argument_right() -> None:
    config = Config.of(
        stage=2, dtype=torch.bfloat16, reduce_dtype=torch.float32, bucket_size="16MiB", prefetch=0, compute="eager"
    )
    assert (config.stage, config.bucket_size, config.prefetch) == (2, 16 * 2**20, 0)
    assert Config.of() == Config()


@pytest.mark.parametrize("recompute", ["auto", "none", "full", 0, 0.5, 1, 1.0])
def test_recompute(recompute: Any) -> None:
    assert Config.of(recompute=recompute).recompute == recompute


def test_a_config_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config.of().stage = 1  # type: ignore[misc]


def test_errors_have_one_base() -> None:
    assert issubclass(ConfigError, ZeroGraphError)


def test_the_hosts_memory_is_reported_where_something_goes_there() -> None:
    split: dict[str, Any] = {"machine": dataclasses.replace(machine_named("cpu"), split=True), "offload": "optimizer"}
    assert Config.of(**split, host_memory="3KiB").host_memory == 3072
    with pytest.raises(ConfigError, match="host_memory: 'much'"):
        Config.of(**split, host_memory="much")
    for options in ({}, {"offload": "optimizer", "path": "/tmp"}, {**split, "path": "/tmp"}):
        with pytest.raises(ConfigError, match="host_memory given, and nothing goes to the host"):
            Config.of(**options, host_memory=2**30)


@pytest.mark.parametrize("offload", ["optimizer", "gradients", "parameters", "auto"])
@pytest.mark.parametrize("tier", [None, "nvme"])
def test_offload_goes_to_nvme_which_needs_a_folder(offload: str, tier: str | None) -> None:
    with pytest.raises(ConfigError, match="need a folder to be kept in"):
        zerograph.backend(offload=offload, tier=tier)
    config = zerograph.backend(offload=offload, tier=tier, path="/tmp", memory="1GiB").config
    assert config.offloads and config.searches
    placement = farthest(config)
    assert placement.offload_tiers == {"nvme"}
    assert placement_of(config) == (DEVICE if offload == "auto" else placement)


@pytest.mark.parametrize("stage", [0, 3])
def test_activations_may_leave_alone(stage: int) -> None:
    with pytest.raises(ConfigError, match="need a folder to be kept in"):
        zerograph.backend(stage=stage, activations="nvme")
    with pytest.raises(ConfigError, match="activations must be one of"):
        zerograph.backend(stage=stage, activations="disk")
    with pytest.raises(ConfigError, match="path given, and nothing goes to NVMe"):
        zerograph.backend(stage=stage, activations="keep", path="/tmp")
    config = zerograph.backend(stage=stage, activations="nvme", path="/tmp").config
    assert config.offload_tiers == {"nvme"} and config.saved == "nvme" and not config.offloads
    assert placement_of(config) == DEVICE
    assert zerograph.backend(activations="host").config.offload_tiers == {"host"}
    assert not zerograph.backend(activations="auto").config.offload_tiers


@pytest.mark.parametrize(("stage", "offload"), [(0, "optimizer"), (1, "gradients"), (2, "parameters")])
def test_what_a_stage_does_not_shard_cannot_be_offloaded(stage: int, offload: str) -> None:
    with pytest.raises(ConfigError, match=f"stage {stage} cannot offload {offload}, which it does not shard"):
        zerograph.backend(stage=stage, offload=offload)


def test_offload_has_the_vocabulary_of_plans() -> None:
    assert (*OFFLOADS, "auto") == OFFLOAD
    for stage in range(4):
        for level, offload in enumerate(OFFLOADS):
            placement = Placement(**dict.fromkeys(OFFLOADS[1 : level + 1], "host"))
            assert placement.least_stage == level
            if level <= stage:
                assert level_at(stage, offload) == level
            else:
                with pytest.raises(ConfigError, match=f"stage {stage} cannot offload {offload}"):
                    level_at(stage, offload)
    assert zerograph.backend(offload="none", tier=None).config.offload == "none"
