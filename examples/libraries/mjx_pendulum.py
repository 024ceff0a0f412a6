"""mujoco-mjx: a double pendulum in MuJoCo's physics, over a batch, and its derivatives."""

import jax
import jax.numpy as jnp
import mujoco
from mujoco import mjx

MODEL = """
<mujoco>
  <option timestep="0.01" iterations="1" ls_iterations="4"/>
  <worldbody>
    <body pos="0 0 2">
      <joint name="a" type="hinge" axis="0 1 0" damping="0.1"/>
      <geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.5"/>
      <body pos="0 0 -0.5">
        <joint name="b" type="hinge" axis="0 1 0" damping="0.1"/>
        <geom type="capsule" size="0.05" fromto="0 0 0 0 0 -0.5"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="a" gear="2"/></actuator>
</mujoco>
"""


def main():
    """Swing it from several angles, and push it upwards by gradients."""
    model = mjx.put_model(mujoco.MjModel.from_xml_string(MODEL))

    def swing(angle, push):
        data = mjx.make_data(model)
        data = data.replace(qpos=jnp.array([angle, 0.0]), ctrl=push)

        def step(data, _):
            data = mjx.step(model, data)
            return data, data.qpos

        return jax.lax.scan(step, data, None, 30)[1]

    angles = jnp.array([0.3, 1.0, 2.0])
    paths = jax.jit(jax.vmap(swing, in_axes=(0, None)))(angles, jnp.zeros(1))
    print("ends", paths[:, -1])
    slope = jax.jit(jax.jacfwd(lambda push: swing(0.3, push)[-1, 0]))(jnp.zeros(1))
    print("push", slope)
    assert (jnp.abs(paths[:, -1, 0]) < angles).all() and slope[0] > 0


if __name__ == "__main__":
    main()
