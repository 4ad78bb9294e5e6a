import torch

import linattn

projection = linattn.RandomProjection(head_dim=16, num_rows=16)
rows = torch.nn.functional.normalize(projection.rows, dim=-1)
print(torch.allclose(rows @ rows.mT, torch.eye(16), atol=1e-5))  # True
