"""What is put in the place of vLLM's own code, one module for each patch; `kernels.plugin` installs them."""
