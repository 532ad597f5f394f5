"""The five models' attention stacks at their true size, with random weights, under caches that are measured.

What memory and time a cache takes does not depend on what a model's weights say. So the stacks are built here, from
tables of shapes (``models/*.toml``), each with the protocol by which its host keeps a cache, so that
:func:`quantwm_models.attach` puts a compressed one under it as it does under the host. They generate nothing to look at.
"""
