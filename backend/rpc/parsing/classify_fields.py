"""The fields of TokenClassify: request -> call, entities -> response."""

from collections.abc import Sequence

from backend.core.classification import ClassifyCall, Entity
from backend.errors import InvalidRequestError
from backend.pb import backend_pb2 as pb
from backend.rpc.parsing.limits import refuse_unserved


def classify_call(request: pb.TokenClassifyRequest) -> ClassifyCall:
    """Return the call of a request.

    Raises:
        InvalidRequestError: The threshold is not a probability, or the request asks for labels of
            its own.
    """
    refuse_unserved(request, "labels", "is not served: a model has the labels it was trained with")
    if not 0.0 <= request.threshold <= 1.0:
        problem = f"must be between 0 and 1, not {request.threshold:g}"
        raise InvalidRequestError("threshold", problem)
    return ClassifyCall(request.text, request.threshold)


def classify_response(entities: Sequence[Entity]) -> pb.TokenClassifyResponse:
    """Return the answer."""
    return pb.TokenClassifyResponse(
        entities=[
            pb.TokenClassifyEntity(
                entity_group=entity.group,
                start=entity.start,
                end=entity.end,
                score=entity.probability,
                text=entity.text,
            )
            for entity in entities
        ]
    )
