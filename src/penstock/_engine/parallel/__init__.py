"""Adapters to torch's sharding and replication: DTensor, DeviceMesh, DDP, FSDP2.

Names are imported on first use, since torch needs half a second to import DTensors, which few runs use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._engine.lazily import lazily

if TYPE_CHECKING:
    from penstock._engine.parallel.adapters import Adapter as Adapter
    from penstock._engine.parallel.adapters import Adapters as Adapters
    from penstock._engine.parallel.adapters import ReplicatedStage as ReplicatedStage
    from penstock._engine.parallel.adapters import adapter_of as adapter_of
    from penstock._engine.parallel.groups import group_across as group_across
    from penstock._engine.parallel.groups import group_of as group_of
    from penstock._engine.parallel.groups import groups_beside as groups_beside
    from penstock._engine.parallel.groups import meeting_in_time as meeting_in_time
    from penstock._engine.parallel.groups import members_of as members_of
    from penstock._engine.parallel.groups import pipelines_in as pipelines_in
    from penstock._engine.parallel.groups import ranks_in as ranks_in
    from penstock._engine.parallel.groups import replicated_mesh as replicated_mesh
    from penstock._engine.parallel.groups import seat as seat
    from penstock._engine.parallel.groups import side_by_side as side_by_side
    from penstock._engine.parallel.replicas import begin_equal as begin_equal
    from penstock._engine.parallel.replicas import left_alone as left_alone
    from penstock._engine.parallel.tensors import arrived as arrived
    from penstock._engine.parallel.tensors import gathered as gathered
    from penstock._engine.parallel.tensors import global_norms as global_norms
    from penstock._engine.parallel.tensors import is_sharded as is_sharded
    from penstock._engine.parallel.tensors import let_cross as let_cross
    from penstock._engine.parallel.tensors import local_part as local_part
    from penstock._engine.parallel.tensors import merge_sharded as merge_sharded
    from penstock._engine.parallel.tensors import put_together as put_together
    from penstock._engine.parallel.tensors import region_of as region_of
    from penstock._engine.parallel.tensors import replicated_like as replicated_like
    from penstock._engine.parallel.tensors import split_sharded as split_sharded
    from penstock._engine.parallel.tensors import spread as spread
    from penstock._engine.parallel.tensors import take_apart as take_apart
    from penstock._engine.parallel.tensors import whole as whole
    from penstock._engine.parallel.tensors import with_local as with_local
    from penstock._engine.parallel.wrapping import Member as Member
    from penstock._engine.parallel.wrapping import may_cast as may_cast
    from penstock._engine.parallel.wrapping import named_buffers as named_buffers
    from penstock._engine.parallel.wrapping import named_parameters as named_parameters
    from penstock._engine.parallel.wrapping import names_without_wrappers as names_without_wrappers
    from penstock._engine.parallel.wrapping import parts_of as parts_of
    from penstock._engine.parallel.wrapping import path_without_wrappers as path_without_wrappers
    from penstock._engine.parallel.wrapping import shard as shard
    from penstock._engine.parallel.wrapping import spread_parts as spread_parts
    from penstock._engine.parallel.wrapping import unwrapped as unwrapped

__all__, __getattr__, __dir__ = lazily(__name__)
