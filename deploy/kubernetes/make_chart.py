"""Write the templates of the Helm chart: the overlays of Kustomize, with values in some places.

python deploy/kubernetes/make_chart.py, after each change of base/, components/ or overlays/.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).parent
TEMPLATES = HERE / "chart" / "templates"
OVERLAYS = ("daemonset", "daemonset-tls", "sidecar", "sidecar-tls")
PLACES = (
    ("namespace: dataplane\n", "namespace: {{ .Release.Namespace }}\n"),
    ("dataplane.dataplane.svc", "dataplane.{{ .Release.Namespace }}.svc"),
    ("metrics.dataplane.svc", "metrics.{{ .Release.Namespace }}.svc"),
    ("/ns/dataplane/", "/ns/{{ .Release.Namespace }}/"),
    ("image: dataplane:0.1.0\n", "image: {{ .Values.image }}\n"),
    ("cidr: 10.0.0.0/8\n", "cidr: {{ .Values.hosts }}\n"),
    ("storage: 1Gi\n", "storage: {{ .Values.storage }}\n"),
    ('cpu: "4"\n', 'cpu: "{{ .Values.node.cpu }}"\n'),
    ("memory: 32Gi\n", "memory: {{ .Values.node.memory }}\n"),
    ("memory: 64Gi\n", "memory: {{ .Values.node.memoryMax }}\n"),
)
"""Texts of the overlays, and what the chart has there."""


def template(overlay: str) -> str:
    """Return the template that gives this overlay, with the values of values.yaml."""
    command = ["kubectl", "kustomize", str(HERE / "overlays" / overlay)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return _if(f'eq .Values.overlay "{overlay}"', text)


def monitors() -> str:
    """Return the template of what Prometheus scrapes."""
    plain, tls = (
        (HERE / "components" / name / "podmonitor.yaml").read_text()
        for name in ("metrics", "metrics-tls")
    )
    has_tls = 'hasSuffix "-tls" .Values.overlay'
    return _if(f"and .Values.podMonitor (not ({has_tls}))", plain) + _if(
        f"and .Values.podMonitor ({has_tls})", tls
    )


def _if(condition: str, text: str) -> str:
    for ours, theirs in PLACES:
        text = text.replace(ours, theirs)
    about = "{{- /* Written by make_chart.py; do not edit. */}}\n"
    return f"{about}{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"


if __name__ == "__main__":
    for name in OVERLAYS:
        (TEMPLATES / f"{name}.yaml").write_text(template(name))
    (TEMPLATES / "podmonitor.yaml").write_text(monitors())
