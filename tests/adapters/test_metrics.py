from extproc.adapters.metrics import Metrics
from extproc.core.decision import Decision, DecisionId, Reason, RoutingRequest
from extproc.core.endpoint import Endpoint
from extproc.core.errors import SheddingError
from extproc.core.events import EndpointDown, EndpointUp
from extproc.core.prediction import Tally
from extproc.core.router import EndpointView

A, B = Endpoint("10.0.0.1:8000"), Endpoint("10.0.0.2:8000")


def decision(endpoint: Endpoint = A) -> Decision:
    return Decision(
        decision_id=DecisionId("r-1"),
        endpoints=(endpoint,),
        policy="tiered",
        reason=Reason.MATCH,
        request=RoutingRequest(prompt_tokens=100),
        matched_tokens=60,
    )


def view(endpoint: Endpoint, *, ready: bool = True) -> EndpointView:
    return EndpointView(
        endpoint=endpoint,
        weight=1.0,
        ready=ready,
        draining=False,
        outstanding_tokens=12.0,
        inflight=3.0,
        blocks=7,
        held_back=False,
        cached=Tally(requests=2, predicted=30, routed=40, hits=20, queries=50),
        healed=1,
    )


def metrics(*views: EndpointView) -> Metrics:
    return Metrics(snapshot=lambda: views, is_ready=lambda: bool(views))


def lines(subject: Metrics) -> list[str]:
    return subject.render().decode().splitlines()


def test_a_decision_is_counted_with_its_tokens():
    subject = metrics()
    subject.count_decision(decision(), 0.0001)
    page = lines(subject)

    assert (
        'extproc_decisions_total{endpoint="10.0.0.1:8000",policy="tiered",reason="match"} 1.0'
        in page
    )
    assert "extproc_prompt_tokens_total 100.0" in page
    assert "extproc_matched_tokens_total 60.0" in page
    assert "extproc_decision_seconds_count 1.0" in page


def test_series_of_an_endpoint_end_with_it():
    subject = metrics()
    for endpoint in (A, B):
        subject.count_decision(decision(endpoint), 0.0001)
    subject.update(EndpointUp(endpoint=A))
    subject.update(EndpointDown(B))
    subject.update(EndpointDown(A, gone=True))
    subject.update(EndpointDown(A, gone=True))
    page = subject.render().decode()

    assert A not in page
    assert B in page


def test_the_pool_is_read_when_the_page_is():
    page = lines(metrics(view(A), view(B, ready=False)))

    assert "extproc_ready 1.0" in page
    assert 'extproc_inflight{endpoint="10.0.0.1:8000"} 3.0' in page
    assert 'extproc_outstanding_tokens{endpoint="10.0.0.1:8000"} 12.0' in page
    assert 'extproc_index_blocks{endpoint="10.0.0.1:8000"} 7.0' in page
    assert 'extproc_endpoint_ready{endpoint="10.0.0.2:8000"} 0.0' in page


def test_ends_retries_and_fallbacks_are_counted():
    subject = metrics()
    subject.count_finish(attempts=1, fell_back=False)
    subject.count_finish(attempts=3, fell_back=True)
    page = lines(subject)

    assert "extproc_finished_total 2.0" in page
    assert "extproc_retries_total 2.0" in page
    assert "extproc_fallbacks_total 1.0" in page


def test_refusals_errors_and_streams_are_counted():
    subject = metrics()
    subject.count_refusal(SheddingError("full"))
    subject.count_error()
    subject.open_stream()
    subject.open_stream()
    subject.close_stream()
    page = lines(subject)

    assert 'extproc_refused_total{code="overloaded"} 1.0' in page
    assert "extproc_errors_total 1.0" in page
    assert "extproc_streams_open 1.0" in page


def test_two_routers_in_one_process_count_apart():
    first, second = metrics(), metrics()
    first.count_error()

    assert "extproc_errors_total 0.0" in lines(second)
