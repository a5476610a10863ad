"""Jobs on Kubernetes as ``status`` shows them."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from provision.jobs.screen import STYLE, say


def show(reports: list[dict[str, Any]], console: Console, flag: str) -> None:
    """Print jobs with their pods."""
    for item in reports:
        style = STYLE.get(item["state"], "cyan")
        head = f"{item['job']}  [{style}]{item['state']}[/]  on kubernetes"
        head += f", namespace {item['namespace']}" if item["namespace"] else ""
        say(console, head + (f"  {escape(item['progress'])}" if item["progress"] else ""))
        for line in (item["message"], item["problem"]):
            if line:
                say(console, f"  {escape(line)}")
        if item["pods"]:
            console.print(_table(item["pods"]))
        for pod in item["pods"]:
            if pod["trouble"]:
                mark = "[yellow]![/]" if pod["passing"] else "[red]✗[/]"
                say(console, f"{mark} {pod['name']}: {escape(pod['trouble'])}")
        if item["state"] != "running" and item["pods"]:
            say(console, f"[yellow]![/] its pods still run; stop them with: oeprov stop {item['job']}{flag}")
        elif item["state"] in ("failed", "interrupted") and "source" not in item:
            say(console, f"resume with: oeprov resume {item['job']}{flag}")


def _table(pods: list[dict[str, Any]]) -> Table:
    table = Table("pod", "node", "state", "ready", "restarts", box=None, pad_edge=False)
    for pod in pods:
        ready = "yes" if pod["ready"] else "no"
        table.add_row(pod["name"], pod["node"] or "–", pod["state"], ready, str(pod["restarts"]))
    return table
