"""Where parameters, gradients, states and saved activations live: on the device, on the host, on NVMe."""
