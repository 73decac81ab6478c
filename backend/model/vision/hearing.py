"""The longest sound that a processor does not cut."""

from inspect import signature

from backend.model.vision.processor_call import HfProcessor

# Arguments of feature extractors, whose defaults apply.
_CUT_BY = ("truncation", "max_length")


def most_heard_s(processor: HfProcessor, sampling_rate: int) -> float | None:
    """Return the length in seconds of the longest sound that a processor takes whole.

    Args:
        processor: May cut sounds without a word.
        sampling_rate: Of its sounds, in Hz.
    """
    tokens = getattr(processor, "audio_seq_length", None)
    ms_per_token = getattr(processor, "audio_ms_per_token", None)
    if tokens and ms_per_token:
        return float(tokens * ms_per_token / 1000)
    extractor = getattr(processor, "feature_extractor", None)
    options = signature(extractor).parameters if callable(extractor) else {}
    cuts, samples = (options[name].default if name in options else None for name in _CUT_BY)
    return samples / sampling_rate if cuts is True and isinstance(samples, int) else None
