from dataclasses import dataclass
@dataclass(frozen=True)
class Report:
    plans: tuple
class Explanation: ...
def explain(p): return p
