import torch

from linattn import states

x = torch.ones(1, requires_grad=True)
print(states.detach((x, 2 * x))[1].requires_grad)  # False
