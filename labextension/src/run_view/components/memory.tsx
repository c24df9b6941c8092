import type { MemoryBlock } from "../messages";

/** Titles of a bar's parts: memory of tensors, unused memory of torch's allocator, memory of other processes. */
const PARTS = ["used", "reserved, unused", "other processes"];

function Cells({ texts }: { texts: readonly string[] }) {
  return (
    <>
      {texts.map((text, at) => (
        <td key={at}>{text}</td>
      ))}
    </>
  );
}

/** Memory use when an allocation failed: by rank, then the culprit's largest tensors. */
export function Memory({ memory }: { memory: MemoryBlock }) {
  return (
    <div class="sgpu-memory" aria-label={memory.title} role="group">
      {memory.title}
      <table class="sgpu-ranks">
        <thead>
          <tr>
            {memory.heads.map((head) => (
              <th key={head}>{head}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {memory.rows.map(({ rank, cells, shares, culprit }) => (
            <tr key={rank} class={culprit ? "sgpu-culprit" : ""}>
              <td>{rank}</td>
              <Cells texts={cells} />
              <td>
                <div class="sgpu-shares">
                  {shares.map((share, at) => (
                    <i key={at} title={PARTS[at]} style={{ width: `${share * 100}%` }} />
                  ))}
                </div>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {memory.more && <div>{memory.more}</div>}
      {memory.tensors.length > 0 && (
        <>
          {memory.largest}
          <table>
            <tbody>
              {memory.tensors.map(({ name, cells }, at) => (
                <tr key={at}>
                  <td>{name}</td>
                  <Cells texts={cells} />
                </tr>
              ))}
            </tbody>
          </table>
        </>
      )}
    </div>
  );
}
