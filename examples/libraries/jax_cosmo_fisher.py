"""jax-cosmo: distances, power spectra, and derivatives by the parameters of the universe."""

import jax
import jax.numpy as jnp
import jax_cosmo as jc


def main():
    """The growth of structure, and how angular spectra answer to two parameters."""
    cosmology = jc.Planck15()
    z = jnp.linspace(0.1, 2.0, 5)
    a = jc.utils.z2a(z)
    print("distances", jc.background.radial_comoving_distance(cosmology, a))
    print("growth", jc.background.growth_factor(cosmology, a))
    k = jnp.logspace(-3, 0, 6)
    print("linear", jc.power.linear_matter_power(cosmology, k))
    bins = [jc.redshift.smail_nz(1.0, 2.0, 0.5)]
    ell = jnp.logspace(1, 3, 4)

    @jax.jit
    def spectra(params):
        universe = jc.Planck15(Omega_c=params[0], sigma8=params[1])
        probe = [jc.probes.NumberCounts(bins, jc.bias.constant_linear_bias(1.5))]
        return jc.angular_cl.angular_cl(universe, ell, probe, nonlinear_fn=jc.power.linear)

    params = jnp.array([0.26, 0.81])
    print("spectra", spectra(params) * 1e9)
    jacobian = jax.jacfwd(spectra)(params)[0]
    print("relative answer", jacobian.T / spectra(params))
    assert jnp.allclose(jacobian[0, 1] / spectra(params)[0, 0] * 0.81, 2.0, atol=0.3)


if __name__ == "__main__":
    main()
