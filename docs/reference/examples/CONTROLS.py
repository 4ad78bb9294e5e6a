from linattn.linearize import CONTROLS

print(list(CONTROLS))  # ['window alone', 'linear part off', 'uniform attention']
