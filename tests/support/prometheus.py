"""The figures of `/metrics`."""

from prometheus_client.parser import text_string_to_metric_families

from tests.support.serving import MODEL


def figures(running):
    """Parse metrics: value by "name{label=value}", without the model's label."""
    with running.http() as http:
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("nanovllm:"):
                assert labels.pop("model_name") == MODEL
            shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            found[sample.name.removeprefix("nanovllm:") + (f"{{{shown}}}" if shown else "")] = sample.value
    return found
