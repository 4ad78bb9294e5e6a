import linattn

# 200 positions from 10 + 20 vectors
positions = linattn.AxialPositions(32, (10, 20))
print(sum(weight.numel() for weight in positions.parameters()))  # 960
