"""`dataplane index --codes`: find the values of columns, and store them in the manifest."""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.commands.options import Settings
from dataplane.commands.own_node import opened_again
from dataplane.plan.manifest import Manifest


def with_codes(
    manifest: Manifest, columns: Sequence[str], format_name: str, settings: Settings
) -> Manifest:
    """Return the manifest with the values of these columns, which a node started here reads.

    Raises:  ConfigError: a column does not exist, or cannot have codes.  The errors of a job.
    """
    from dataplane.client.describe import category_values
    from dataplane.model import View
    from dataplane.transforms.codes import stored_values
    from dataplane.transforms.options import column_options

    options = column_options(columns=columns, codes=columns)
    with opened_again(manifest, format_name, settings, options, View()) as session:
        values = {name: stored_values(category_values(session, name)) for name in columns}
    return manifest.with_categories(values)
