"""Makes the grammars of requests: written and tried in processes, compiled in this one."""
