"""`dataplane index --codes`: finds the values of columns, to store them in the manifest."""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.commands.options import Settings
from dataplane.commands.own_node import own_session
from dataplane.errors import DatasetChangedError
from dataplane.plan.manifest import Manifest


def with_codes(
    manifest: Manifest, columns: Sequence[str], format_name: str, settings: Settings
) -> Manifest:
    """The manifest with the values of these columns, which a node started here reads.

    Raises:  ConfigError: a column does not exist, or cannot have codes.  The errors of a job.
    """
    from dataplane.client import identity
    from dataplane.client.describe import category_values
    from dataplane.model import Topology
    from dataplane.rpc.messages import DatasetSource, OpenJob
    from dataplane.transforms.codes import stored_values
    from dataplane.transforms.options import column_options

    launch = identity.launch_identity({})
    request = OpenJob(
        identity.job_id(launch, manifest.urls, None),
        launch.incarnation,
        "",
        DatasetSource(manifest.urls, format_name),
        Topology(),
        column_options=column_options(columns=columns, codes=columns),
    )
    session = own_session(request, settings)
    try:
        found = session.job.spec.fingerprint
        if found != manifest.fingerprint:
            raise DatasetChangedError(
                "the dataset has changed since this manifest was made: index it again",
                shard=", ".join(manifest.urls),
                expected=manifest.fingerprint,
                found=found,
            )
        values = {name: stored_values(category_values(session, name)) for name in columns}
    finally:
        session.close()
    return manifest.with_categories(values)
