"""The Grafana dashboard of docs/watching is well formed, and about metrics that servers export."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import prometheus_client
import promql_parser as promql
import pytest
import yaml

from jaxfleet.ps.server.metrics import MetricsExporter, ServerMetrics
from jaxfleet.tables import TableSpec
from jaxfleet.tables.tiered import make_store
from jaxfleet.transport.messages import Kind
from tests.ps.server.common import SGD, Bench, sgd_state

FOLDER = Path(__file__).parents[2] / "docs" / "watching"
BOARD: dict[str, Any] = json.loads((FOLDER / "jaxfleet.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
KINDS = {"row", "stat", "table", "timeseries"}
WIDTH = 24  # columns of Grafana's grid

# Variables of Grafana's own and of the dashboard, which are no PromQL.
VARIABLES = {"$__rate_interval": "1m", "$__range": "1h"}
SELECTED = {"$job": ".*", "$instance": ".*", "$metric": ".*"}

OF_PROMETHEUS = {"job", "instance"}  # labels that a scrape adds
ON_NO_PANEL = {
    "jaxfleet_ended": "Prometheus scrapes too seldom to see it: it is for top",
    "jaxfleet_failed": "the same",
    "jaxfleet_trainer_connected": "an event of top; a panel has those that are lost",
    "jaxfleet_trainer_scalar_step": "the time axis stands for it",
    "jaxfleet_job_restarts": "its panels show a server's start time, which a restart changes too",
    "jaxfleet_table_longest_pause_s": "the worst of a whole run; step.stats() has it",
}


def all_metrics() -> ServerMetrics:
    """Returns the metrics of a server with all features."""
    bench = Bench().started(SGD, sgd_state())
    bench.one(0, Kind.HEARTBEAT, body={"doing": "step 1", "scalar_step": 1, "scalars": {"x": 1.0}})
    stores = [make_store(TableSpec(name="t", dim=1, memory_rows=rows)) for rows in (None, 20)]
    tables: dict[str, Any] = {name: store.stats() for name, store in zip("ab", stores, strict=True)}
    found = bench.core.metrics(bench.now)
    return replace(found, counted={**found.counted, "saved": 1, "tables": tables})


def exported() -> dict[str, set[str]]:
    """Returns the labels of each metric that it exports."""
    exporter, registry = MetricsExporter(), prometheus_client.CollectorRegistry()
    exporter.publish(all_metrics())
    registry.register(exporter)
    labels: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


EXPORTED = exported()


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel.get("targets", ())]


def with_values(expression: str) -> str:
    """Returns an expression with values for Grafana's variables."""
    for name, value in (VARIABLES | SELECTED).items():
        expression = re.sub(rf"{re.escape(name)}\b", value, expression)
    assert "$" not in expression
    return expression


def parsed(expression: str) -> Any:
    return promql.parse(with_values(expression))


def nodes(node: Any) -> Iterator[Any]:
    """Yields a node of a PromQL expression, and all below it."""
    yield node
    match node:
        case promql.BinaryExpr():
            below = [node.lhs, node.rhs]
        case promql.Call():
            below = list(node.args)
        case promql.MatrixSelector():
            below = [node.vector_selector]
        case promql.AggregateExpr() | promql.ParenExpr() | promql.UnaryExpr():
            below = [node.expr]
        case _:
            assert isinstance(node, promql.VectorSelector | promql.NumberLiteral)
            below = []
    for each in below:
        yield from nodes(each)


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Returns each selected metric, with the labels that it is selected by."""
    found = [x for x in nodes(parsed(expression)) if isinstance(x, promql.VectorSelector)]
    return [(str(x.name), {matcher.name for matcher in x.matchers.matchers}) for x in found]


def test_the_dashboard_can_be_provisioned() -> None:
    assert BOARD["uid"] == "jaxfleet"
    assert BOARD["schemaVersion"] >= 36  # the first whose data sources are objects with a uid
    assert BOARD["id"] is None  # Grafana gives it one
    assert BOARD["time"] == {"from": "now-15m", "to": "now"}


def test_each_panel_has_its_own_id_a_title_and_a_known_kind() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    assert {panel["type"] for panel in PANELS} == KINDS
    for panel in PANELS:
        assert panel["title"]
        assert panel["type"] == "row" or (panel["description"] and panel["targets"])


def cells(panel: Mapping[str, Any]) -> set[tuple[int, int]]:
    at = panel["gridPos"]
    columns = range(at["x"], at["x"] + at["w"])
    return set(itertools.product(columns, range(at["y"], at["y"] + at["h"])))


def test_panels_lie_beside_each_other_on_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        own = cells(panel)
        assert own
        assert not own & taken, panel["title"]
        assert all(0 <= x < WIDTH and y >= 0 for x, y in own)
        taken |= own


def test_every_data_source_is_the_one_that_the_user_chooses() -> None:
    names = {variable["name"]: variable["type"] for variable in BOARD["templating"]["list"]}
    assert names == dict.fromkeys(("job", "instance", "metric"), "query") | {
        "datasource": "datasource"
    }
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    queried = [x for x in BOARD["templating"]["list"] if x["type"] == "query"]
    targets = [target for panel in PANELS for target in panel.get("targets", ())]
    panels = [panel for panel in PANELS if panel["type"] != "row"]
    assert all(each["datasource"] == chosen for each in (*queried, *targets, *panels))


def test_targets_of_a_panel_have_letters_of_their_own() -> None:
    for panel in PANELS:
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters)


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_selects_metrics_and_labels_that_servers_export(expression: str) -> None:
    found = selectors(expression)
    assert found
    for name, labels in found:
        assert name in EXPORTED, f"no server exports {name}"
        assert labels <= EXPORTED[name] | OF_PROMETHEUS
        assert labels >= OF_PROMETHEUS  # or the choice of a job would not count
    for node in nodes(parsed(expression)):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            below = [x for x in nodes(node.expr) if isinstance(x, promql.VectorSelector)]
            known = set.union(*(EXPORTED[str(x.name)] for x in below)) | OF_PROMETHEUS
            assert set(node.modifier.labels) <= known


def test_every_exported_metric_is_on_a_panel_or_left_out_for_a_reason() -> None:
    shown = {name for text in expressions() for name, _ in selectors(text)}
    assert EXPORTED.keys() - shown == ON_NO_PANEL.keys()


@pytest.mark.parametrize(
    "variable", [x for x in BOARD["templating"]["list"] if x["type"] == "query"]
)
def test_a_variable_lists_values_of_a_label(variable: dict[str, Any]) -> None:
    asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
    assert asked is not None
    ((name, _),) = selectors(asked[1])
    assert asked[2] in EXPORTED[name] | OF_PROMETHEUS
    assert variable["definition"] == variable["query"]["query"]


def test_legends_name_labels_that_the_result_has() -> None:
    for panel in PANELS:
        for target in panel.get("targets", ()):
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = set(re.findall(r"\b(?:by) \(([^)]*)\)", target["expr"]))
            by = {label.strip() for labels in kept for label in labels.split(",")}
            assert named <= (by or OF_PROMETHEUS), panel["title"]


def test_provisioning_and_prometheus_agree() -> None:
    prometheus = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    interval = prometheus["global"]["scrape_interval"]
    (scraped,) = prometheus["scrape_configs"]
    assert scraped["job_name"] == "jaxfleet"
    assert scraped["authorization"] == {"type": "Bearer", "credentials_file": "jaxfleet-token"}
    provisioned = FOLDER / "provisioning"
    sources = yaml.safe_load((provisioned / "datasources" / "prometheus.yml").read_text())
    (source,) = sources["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert source["jsonData"]["timeInterval"] == interval  # $__rate_interval is four of them
    (provider,) = yaml.safe_load((provisioned / "dashboards" / "jaxfleet.yml").read_text())[
        "providers"
    ]
    assert provider["type"] == "file"
    assert provider["options"]["path"] in (FOLDER.parent / "watching.md").read_text()
