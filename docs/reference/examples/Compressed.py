import torch

from linattn import states

small = states.compress(torch.randn(2, 64), torch.int8)
print(type(small) is states.Compressed, small.numbers.dtype)  # True torch.int8
