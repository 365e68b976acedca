"""The orders of epochs, which the ranks of a job share."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from dataplane.model.changes import Tombstone
from dataplane.model.config import JobSpec
from dataplane.model.records import ColumnOptions, End, MixHistory
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import SampleOrder
from dataplane.plan.orders import delivered_order, with_mix
from dataplane.plan.views import samples_of

_ORDERS_MAX = 8


class Orders:
    """The orders that were used last."""

    def __init__(self) -> None:
        self._orders: OrderedDict[object, asyncio.Future[SampleOrder]] = OrderedDict()

    async def of(
        self,
        spec: JobSpec,
        manifests: Sequence[Manifest],
        epoch: int,
        mix: MixHistory | None = None,
        tombstones: Sequence[Tombstone] = (),
    ) -> SampleOrder:
        """Return the order of an epoch of a job over these datasets, with the weights of `mix`, and
        without the removed rows.

        Raises:  DataplaneError: it cannot be made; the next call tries again.
        """
        spec = with_mix(spec, mix)
        # All options but those that no order depends on, so that a new one need not be named here.
        named = replace(
            spec,
            global_batch=1,
            end=End.RAGGED,
            transforms=(),
            column_options=ColumnOptions(),
            view=samples_of(spec.view, spec.seed)[0],
        )
        key = (named, epoch, tuple(tombstones))
        future = self._orders.get(key)
        if future is None:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(None, delivered_order, spec, manifests, epoch, tombstones)
            self._orders[key] = future
            future.add_done_callback(partial(self._forget_failed, key))
            if len(self._orders) > _ORDERS_MAX:
                self._orders.popitem(last=False)
        return await asyncio.shield(future)

    def _forget_failed(self, key: object, done: asyncio.Future[SampleOrder]) -> None:
        """Forget a failed plan, so that the next request for this order tries again."""
        if (done.cancelled() or done.exception()) and self._orders.get(key) is done:
            del self._orders[key]
