"""What a run over a store needs: see remote_epoch.py."""

from __future__ import annotations

from remote_epoch import bucket, manifest, proxy, whole

__all__ = ["bucket", "manifest", "proxy", "whole"]
