"""How model families write thoughts and tool calls: data, one file per format.

`output` builds lenient readers from these formats, `sampling` builds strict grammars.
"""
