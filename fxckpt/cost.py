from dataclasses import dataclass
from typing import Protocol
import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry
class CostModel(Protocol): ...
@dataclass(frozen=True)
class Tmp:
    name: str = "roofline"
    def flops(self, node):
        t = node.target
        p = getattr(t, "overloadpacket", None)
        if p in flop_registry:
            a = fx.map_arg(node.args, lambda n: n.meta["val"]); k = fx.map_arg(node.kwargs, lambda n: n.meta["val"])
            return int(flop_registry[p](*a, **k, out_val=node.meta["val"]))
        return 0
    def seconds(self, node):
        b = sum(t.numel()*t.element_size() for n in [node, *node.all_input_nodes] for t in pytree.tree_leaves(n.meta.get("val")) if isinstance(t, torch.Tensor))
        return max(self.flops(node)/1e11, b/1e10) 
def resolve(cost, device): return Tmp()
def checked(x): return x
