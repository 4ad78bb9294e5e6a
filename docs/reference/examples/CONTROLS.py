from linattn.integrations.transformers.linearize import CONTROLS

print(list(CONTROLS))  # ['window alone', 'linear part off', 'uniform attention']
